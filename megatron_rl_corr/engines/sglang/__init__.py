"""SGLang's protocol."""
