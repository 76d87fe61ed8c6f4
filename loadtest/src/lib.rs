//! Looplane's load tester: sees the product only from outside.
#![forbid(unsafe_code)]
