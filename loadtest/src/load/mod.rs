//! What is sent: when requests are due, how long they are, what they say, and which of them a client spoils on purpose.

pub mod arrivals;
pub mod broken;
pub mod conduct;
pub mod lengths;
pub mod pacing;
pub mod prompt;
pub mod shapes;
pub mod trace;
