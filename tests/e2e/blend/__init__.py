"""What blending loses: a trained model that is asked about prompts put together from chunks."""
