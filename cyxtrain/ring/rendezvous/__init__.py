"""Ranks find each other, authenticate, and connect every pair; strangers are turned away."""
