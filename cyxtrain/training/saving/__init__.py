"""What outlives a process: checkpoints and weights.

writer, folder    beside the training: who writes, where, and which ones stay
transport         rank 0 reads, the others receive
checkpoint        the file: which entries hold what
archive           its outside: one stored zip of which every byte has a checksum
weights           a model's weights as a plain safetensors file
optimizer_state   an optimizer's state by parameter name
names             a model's names as the user wrote them, compiled or not
tensors, tree     tensors and nested values in a form that files can hold
files             all of a file, or none of it
"""
