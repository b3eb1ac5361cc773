"""The command line: cyxtrain fit, evaluate, launch, bench, bisect, doctor, completion."""
