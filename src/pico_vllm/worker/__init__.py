"""Everything that touches a device: rows, inputs, the forward pass, sampling. Knows no queues and no policy."""
