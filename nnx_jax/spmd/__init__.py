"""Several devices under one step: meshes and what lies where on them."""
