"""Upload of a bundle to a repository of the Hugging Face Hub: content, model card, commit."""
