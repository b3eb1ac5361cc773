"""The command line: cyxtrain fit, evaluate, launch, bench, bisect, replay, doctor, completion."""
