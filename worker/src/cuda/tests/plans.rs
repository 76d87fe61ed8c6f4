//! The loop against a model that is nothing but the page table: what a row sees through it decides the next token.
