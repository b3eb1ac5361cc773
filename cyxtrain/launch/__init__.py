"""The command line: cyxtrain fit, launch, bench, doctor."""
