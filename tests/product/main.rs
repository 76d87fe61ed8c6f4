//! The product as processes: the binary that users run, with real workers, asked as clients ask it. `plans` and
//! `schemas` start none: they join two crates that do not know each other.

mod api;
mod bits;
#[path = "../../loadtest/tests/pages/browser.rs"]
mod browser;
mod chat_page;
mod clients;
mod common;
mod demo;
mod deploy;
mod dialects;
mod docs;
mod golden;
mod join;
mod keys;
mod loadtest;
mod machine_page;
mod metrics;
mod notify;
mod plans;
mod prefix_cache;
mod process;
mod prometheus;
mod refusals;
mod replicas;
mod restart;
mod schemas;
#[path = "../../server/tests/common/scrape.rs"]
mod scrape;
mod start;
mod storm;
mod structured;
mod sweep;
mod tls;
