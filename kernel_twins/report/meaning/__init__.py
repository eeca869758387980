"""What rows mean: ratios, limits, predictions and what came of them."""
