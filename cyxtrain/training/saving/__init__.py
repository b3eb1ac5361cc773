"""What outlives a process: checkpoints and weights.

snapshot          between a trainer and a checkpoint: what is saved, who reads and writes
checkpoint        the file: which entries hold what
archive           its outside: one stored zip of which every byte has a checksum
weights           a model's weights as a plain safetensors file
optimizer_state   an optimizer's state by parameter name
tensors, tree     tensors and nested values in a form that files can hold
files             all of a file, or none of it
"""
