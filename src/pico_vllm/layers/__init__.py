"""The parts models are made of. Each holds its weights and the backend, and keeps no other state."""
