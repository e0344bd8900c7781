"""Modules and functions that a model gets: FP8 layers, compilation, loss scaling, grouped matmuls under autocast.

They run inside the model, and so outside of `mpguard.runtime`, whose frames dynamo skips.
"""
