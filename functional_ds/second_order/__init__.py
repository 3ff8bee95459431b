"""Second derivatives of a step's loss: Hessian-vector products."""
