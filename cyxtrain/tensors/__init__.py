"""Tensors of any layout: take apart, rebuild, write, hash. No communication."""
