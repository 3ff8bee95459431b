"""Views of a state's params with autograd, and checks of the loss's graph for lost gradients."""
