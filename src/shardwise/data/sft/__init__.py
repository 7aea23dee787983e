"""Fine-tuning data (SFT): texts, prompts with completions and conversations from JSONL or a saved dataset, as tokens of which
only the answers are trained on.

Nothing is imported here: the command line checks records before it imports torch.
"""
