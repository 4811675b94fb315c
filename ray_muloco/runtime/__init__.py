"""The algorithm on a cluster. The only package that imports ray."""
