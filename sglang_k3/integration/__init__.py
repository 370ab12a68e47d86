"""The only code that registers with SGLang or hooks into it; one module per seam."""
