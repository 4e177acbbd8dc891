"""Ways to learn that are no loss of (outputs, batch): each an objective with the formula of its paper."""
