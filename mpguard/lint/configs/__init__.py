"""What configs may say: the keys that each framework reads, and what rules ask of one."""
