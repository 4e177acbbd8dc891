"""What a user configures: one frozen specification per noun (net, model, optimizer, scheduler, data, training, run)."""
