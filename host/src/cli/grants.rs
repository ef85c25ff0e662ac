//! `tunehost grants`.

use super::print;
use crate::eligibility::grants;
use crate::eligibility::ledger::Ledger;
use crate::error::Result;
use std::path::Path;

pub fn open(file: &Path) -> Result<()> {
    // Nobody opens a ledger beside a file that no run could use.
    grants::read(file)?;
    let ledger = Ledger::path_for(file);
    Ledger::create(&ledger)?;
    print(&format!("{} is open: runs write into it which grant they use; keep it with the grants", ledger.display()))
}

pub fn show(file: &Path) -> Result<()> {
    let (written, ledger) = (grants::read(file)?, Ledger::read(&Ledger::path_for(file))?);
    print(&grants::table(&written, &ledger))?;
    match ledger.is_torn() {
        true => print(
            "the ledger ends in half a line, of a run that never trained: the next run with these grants moves it aside",
        ),
        false => Ok(()),
    }
}
