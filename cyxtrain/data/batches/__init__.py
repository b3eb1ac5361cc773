"""From rows to a batch on the device."""
