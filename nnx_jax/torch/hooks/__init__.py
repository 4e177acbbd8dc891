"""Update hooks over torch: the eighteen stages of a microbatch, run as written, with tensors that one can look at."""
