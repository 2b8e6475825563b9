"""The coordinate check of muP: how the size of activations depends on the width of a model."""
