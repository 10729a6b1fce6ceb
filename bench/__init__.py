"""Measurements: each ends in one result JSON with its provenance; gates and reports read nothing else."""
