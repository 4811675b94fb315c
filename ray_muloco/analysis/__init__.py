"""What the numbers mean: plots, reports, laws."""
