"""The building blocks of our models, on SGLang's parallel layers."""
