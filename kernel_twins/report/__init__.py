"""From the machine to the page: measures both sets of kernels and writes down what came of it."""
