//! `tunehost config`.

use super::{ConfigArgs, print};
use crate::config;
use crate::error::Result;

pub fn show(args: &ConfigArgs) -> Result<()> {
    print(&config::show(&args.load()?))
}
