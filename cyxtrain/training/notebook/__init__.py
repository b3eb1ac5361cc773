"""A call of fit, evaluate or predict that worker processes make: calls -> performing -> mirroring, there and back."""
