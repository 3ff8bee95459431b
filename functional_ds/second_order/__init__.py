"""Second derivatives of a step's loss: products with its Hessian."""
