"""Text in, batches out: `pipeline.load_data` puts the parts of this package together."""
