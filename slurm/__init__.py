"""Stages as jobs of a Slurm cluster: submitted as a chain, within a cap on GPUs, resumed after preemption."""
