"""The specs of softmax along rows."""
