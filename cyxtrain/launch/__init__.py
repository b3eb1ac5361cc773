"""The command line: cyxtrain fit, evaluate, launch, bench, doctor, completion."""
