"""The accuracy that blending loses, measured with a trained model on prompts assembled from chunks."""
