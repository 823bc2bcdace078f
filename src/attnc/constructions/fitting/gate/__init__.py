"""A gate: a head whose keys carry their own query; the activations and the product, each with its error on all of R."""
