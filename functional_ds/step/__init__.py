"""The step: phases, the state, the tape of one pass, and the transforms' wrap and compose."""
