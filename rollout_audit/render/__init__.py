"""A Report in, text out. Renderers print nothing and see neither tensors nor files."""
