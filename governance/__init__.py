"""Rules, proof and record: admin credentials and the audit trail. Knows nothing of GPUs."""
