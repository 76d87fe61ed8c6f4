//! Figures as text, JSON and page, with plots.

pub mod compare;
pub mod contents;
mod html;
pub mod json;
pub mod page;
pub mod plot;
mod server_side;
mod table;
