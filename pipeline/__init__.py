"""What every stage shares: configs, the stage contract, models by name, prompts by source. Imports nothing of ours."""
