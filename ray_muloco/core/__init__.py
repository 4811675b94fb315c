"""The mathematics: tensors in, tensors out. Imports torch and nothing above."""
