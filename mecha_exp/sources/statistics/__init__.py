"""Statistics of a model on data, as `calibrate` writes them: a file that merges read beside the model.

The keys are `KIND/KEY`, KEY being the key of the model: `fisher/layer.weight` has the shape of the weight,
`gram/layer.weight` is a matrix of its inputs, `activations/layer.weight` has rows of them. The header says
which model and which data they are of.
"""
