"""What evaluators of pictures share: labelled pictures, their processors, encoders, heads and class names."""
