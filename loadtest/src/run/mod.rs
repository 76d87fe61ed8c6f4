//! A load under way: sent, metered, shown and watched; and the load tester measured itself, against a mock.

pub mod calibrate;
pub mod drive;
pub mod lag;
pub mod live;
pub mod meter;
pub mod mock;
pub mod watch;
pub mod workload;
