"""Files in, batches out: which files, which field is what, and the bytes. Each format is one file."""
