//! `tunehost config`.

use super::{ConfigArgs, print};
use crate::config;
use crate::error::Result;

pub fn show(args: &ConfigArgs) -> Result<()> {
    print(&config::show(&config::load(&args.config, &args.sets, &args.plugins)?))
}
