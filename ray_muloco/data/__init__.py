"""Text to token shards to sequences. Imports pyarrow and numpy, never torch."""
